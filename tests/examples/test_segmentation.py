"""The segmentation network: the class map is that of its network."""

import base64
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from examples.segmentation.segmentation import CLASSES, COLOURS, Segmentation
from policies.profile import Profile
from tests.support.example import running_example
from tests.support.http_client import photograph
from tests.support.triton import infer


def test_the_example_answers_as_its_network(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(photograph())
    (tmp_path / "broken.jpg").write_bytes(photograph()[:1000])
    model = Segmentation()
    model.load("cpu")
    image = model.decode(photograph(), "image/jpeg")["image"]
    with torch.inference_mode():
        expected = model.run(torch.from_numpy(image[None].copy()))["classes"][0].numpy()
    with running_example("segmentation", tmp_path, Profile("segmentation", (0.5, 1.0))) as example:
        assert sum(example.call()["outputs"]["shares"].values()) == 1
        outputs = example.call(data_binary=f"@{tmp_path}/photo.jpg")["outputs"]
        refused = example.call(data_binary=f"@{tmp_path}/broken.jpg")
        classes = infer(example.server.url, "segmentation", image=np.stack([image, 255 - image]))["classes"]
    np.testing.assert_array_equal(classes[0], expected)
    assert (classes[1] != expected).any()
    assert outputs["shares"] == {name: (expected == index).mean() for index, name in enumerate(CLASSES)}
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(outputs["png"]))))
    np.testing.assert_array_equal(drawn, COLOURS[expected])
    assert refused == {"error": "the model cannot decode the body: the body is no JPEG or PNG"}
