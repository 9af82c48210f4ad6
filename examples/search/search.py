"""Texts in the order of their similarity to a query, by the embeddings of an encoder."""

import asyncio

import numpy as np

from batchwright import Pipeline, Tensor


class Search(Pipeline):
    """Embeds the query and each text by requests of their own, and ranks the texts."""

    inputs = {"query": Tensor("BYTES", [1]), "texts": Tensor("BYTES", [-1])}
    outputs = {"order": Tensor("INT32", [-1]), "scores": Tensor("FP32", [-1])}
    models = ("minilm",)

    async def run(self, models, query, texts):
        answers = await asyncio.gather(*(models.minilm.predict(text, "text/plain") for text in (*query, *texts)))
        vectors = np.stack([answer["embedding"] for answer in answers])
        scores = vectors[1:] @ vectors[0]
        order = np.argsort(-scores)
        return {"order": order.astype(np.int32), "scores": scores[order]}
