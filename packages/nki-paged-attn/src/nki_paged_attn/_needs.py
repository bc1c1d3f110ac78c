"""Names what the package needs and what is not installed, before something imports it."""

from importlib.util import find_spec

for _module, _requirement in (("numpy", "numpy>=1.26"), ("ml_dtypes", "ml-dtypes>=0.5")):
    if find_spec(_module) is None:
        raise ModuleNotFoundError(
            f'nki-paged-attn needs {_module}, which is not installed: pip install "{_requirement}"',
            name=_module,
        )
