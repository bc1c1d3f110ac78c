"""Two architectures of ``transformers``; the architectures session runs all."""

import subprocess
import sys
from pathlib import Path


def test_a_decoder_and_an_encoder_agree_with_eager_attention():
    script = Path(__file__).with_name("architectures.py")
    command = [sys.executable, str(script), "gemma2", "bert"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["gemma2: 12 agree", "bert: 8 agree"]
