"""A scikit-learn classifier, trained when the server starts, on data that scikit-learn ships."""

import numpy as np
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from batchwright import Model, Tensor


class Iris(Model):
    """Species of an iris from four lengths, in cm."""

    inputs = {"measurements": Tensor("FP32", [4])}
    outputs = {"species": Tensor("BYTES"), "probabilities": Tensor("FP32", [3])}

    def load(self, device):
        iris = load_iris()
        self.species = iris.target_names
        self.classifier = make_pipeline(StandardScaler(), LogisticRegression()).fit(iris.data, iris.target)

    def run(self, measurements):
        probabilities = self.classifier.predict_proba(measurements)
        species = self.species[probabilities.argmax(axis=1)]
        return {"species": species, "probabilities": probabilities.astype(np.float32)}

    def samples(self):
        return [{"measurements": flower} for flower in load_iris().data[::10]]
