// Draws each <div class="plot" data-source="file.json" data-name="figure"> with Plotly, which is
// loaded by the first page that has one. Colours follow the page's, light or dark.

const here = new URL(".", document.currentScript.src);

function load(address) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = address;
    script.onload = resolve;
    script.onerror = () => reject(new Error(`${address} did not load`));
    document.head.append(script);
  });
}

function dress(layout, width) {
  const style = getComputedStyle(document.body);
  const color = style.getPropertyValue("--md-default-fg-color").trim() || "#222";
  const line = style.getPropertyValue("--md-default-fg-color--lightest").trim() || "#ddd";
  const axis = { automargin: true, gridcolor: line, linecolor: line };
  // a narrow screen has a name a line above the bars
  const narrow = width < 500;
  const rows = narrow ? layout.names : 2;
  return {
    ...layout,
    autosize: true,
    barmode: "group",
    font: { color },
    height: (narrow ? 460 : 380) + 19 * rows,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", font: { size: narrow ? 10 : 12 } },
    margin: { l: 50, r: 10, t: 10, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, rangemode: "tozero", ...layout.yaxis },
  };
}

async function draw() {
  const places = [...document.querySelectorAll(".plot")];
  if (!places.length) return;
  await load(new URL("plotly.min.js", here));
  const files = new Map();
  for (const place of places) {
    const { source, name } = place.dataset;
    if (!files.has(source)) files.set(source, fetch(new URL(source, here)).then((x) => x.json()));
    const figure = (await files.get(source))[name];
    const layout = { ...figure.layout, names: figure.data.length };
    await Plotly.newPlot(place, figure.data, dress(layout, place.clientWidth), {
      responsive: true,
    });
  }
  const paint = () =>
    places.forEach((place) => Plotly.relayout(place, dress(place.layout, place.clientWidth)));
  new MutationObserver(paint).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
}

document.addEventListener("DOMContentLoaded", draw);
