"""The speech detector: probabilities are the package's own, at once and in pieces with the state of the client."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("silero_vad")

from tests.support.example import running_example
from tests.support.http_client import fetch


def test_clips_and_pieces_are_answered_as_by_the_package(tmp_path: Path) -> None:
    sound = np.fromfile(_vowel(tmp_path / "vowel.raw"), "<i2").astype(np.float32) / 32768
    expected = _own_answer(sound)
    assert max(expected) > 0.5
    with running_example("speech_detector", tmp_path) as example:
        noise = example.call()["outputs"]["speech"]
        assert len(noise) == 31
        assert max(noise) < 0.5
        url = example.server.url
        whole = fetch(url, "/predict", (tmp_path / "vowel.raw").read_bytes()).json["outputs"]["speech"]
        np.testing.assert_allclose(whole, expected, atol=1e-4)
        found, kept = [], dict[str, Any]()
        for piece in np.split(sound, [5120, 8192]):
            body = json.dumps({"sound": piece.tolist(), **kept}).encode()
            answer = fetch(url, "/predict", body, headers={"Content-Type": "application/json"}).json["outputs"]
            found += answer.pop("speech")
            kept = answer
        np.testing.assert_allclose(found, expected, atol=1e-4)
        short = fetch(url, "/predict", b"12").json
        assert (short["outputs"]["speech"], short["batch_size"]) == ([], 0)


def _vowel(path: Path) -> Path:
    """A sound like a vowel: pulses of a pitch that falls, through three resonances."""
    import scipy.signal

    rate, seconds = 16_000, 1.024
    pitch = np.linspace(180.0, 110.0, round(rate * seconds))
    pulses = np.diff(np.floor(np.cumsum(pitch / rate)), prepend=0.0)
    sound = pulses
    for formant, width in ((700.0, 90.0), (1200.0, 110.0), (2600.0, 160.0)):
        radius = np.exp(-np.pi * width / rate)
        denominator = [1.0, -2.0 * radius * np.cos(2.0 * np.pi * formant / rate), radius**2]
        sound = scipy.signal.lfilter([1.0], denominator, sound)
    envelope = np.abs(np.sin(np.linspace(0.0, 3.0 * np.pi, len(sound))))
    scaled = sound * envelope / np.abs(sound).max() * 20_000
    scaled.astype("<i2").tofile(path)
    return path


def _own_answer(sound: Any) -> list[float]:
    import silero_vad
    import torch

    model = silero_vad.load_silero_vad(onnx=True)
    chunks = torch.from_numpy(sound[: len(sound) // 512 * 512]).reshape(-1, 512)
    return [float(model(chunk, 16_000).item()) for chunk in chunks]
