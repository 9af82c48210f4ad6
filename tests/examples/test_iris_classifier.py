"""The scikit-learn example: answers are those of the classifier itself."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import load_iris

from examples.iris_classifier.iris import Iris
from tests.support.example import running_example
from tests.support.triton import infer


def test_the_example_answers_as_its_classifier(tmp_path: Path) -> None:
    flowers = load_iris().data[::7].astype(np.float32)
    model = Iris()
    model.load("cpu")
    expected = model.run(flowers)
    with running_example("iris_classifier", tmp_path) as example:
        outputs = example.call()["outputs"]
        assert outputs["species"] == "setosa"
        assert np.round(outputs["probabilities"], 2).tolist() == [0.98, 0.02, 0.0]
        answer = infer(example.server.url, "iris", measurements=flowers)
    assert [species.decode() for species in answer["species"]] == expected["species"].tolist()
    np.testing.assert_allclose(answer["probabilities"], expected["probabilities"], rtol=1e-6)
    assert set(answer["species"]) == {b"setosa", b"versicolor", b"virginica"}
