"""silero-vad: the probability of speech in each chunk of 512 samples, 16,000 a second; the client carries the state."""

import json

import numpy as np
import silero_vad

from batchwright import Answer, Kept, Model, Tensor

CHUNK, CONTEXT = 512, 64


class Detector(Model):
    """Probabilities of speech in a clip, and the state after it."""

    inputs = {"sound": Tensor("FP32", [-1, CHUNK + CONTEXT]), "state": Tensor("FP32", [2, 128])}
    outputs = {"speech": Tensor("FP32", [-1]), "next_state": Tensor("FP32", [2, 128])}

    def load(self, device: str) -> None:
        self.session = silero_vad.load_silero_vad(onnx=True).session

    def decode(self, body: bytes, content_type: str) -> Answer | Kept:
        call = json.loads(body) if content_type.startswith("application/json") else {}
        sound = np.array(call["sound"]) if call else np.frombuffer(body, "<i2") / 32768
        if len(sound) < CHUNK:
            return Answer({"speech": [], "state": call.get("state"), "context": call.get("context")})
        context = call.get("context") or [0.0] * CONTEXT
        sound = np.concatenate([context, sound[: len(sound) // CHUNK * CHUNK]]).astype(np.float32)
        chunks = [sound[start : start + CONTEXT + CHUNK] for start in range(0, len(sound) - CONTEXT, CHUNK)]
        return Kept({"sound": chunks, "state": call.get("state") or np.zeros((2, 128))}, sound[-CONTEXT:].tolist())

    def run(self, sound: np.ndarray, state: np.ndarray) -> dict[str, np.ndarray]:
        state, found = state.transpose(1, 0, 2), []
        for chunk in sound.transpose(1, 0, 2):
            speech, state = self.session.run(None, {"input": chunk, "state": state, "sr": np.array(16000)})
            found.append(speech[:, 0])
        return {"speech": np.stack(found, 1), "next_state": state.transpose(1, 0, 2)}

    def render(self, outputs, context=None):
        return {"speech": outputs["speech"].tolist(), "state": outputs["next_state"].tolist(), "context": context}
