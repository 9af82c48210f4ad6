"""The sentences nearest in meaning to a query, by the embeddings that a server answers with."""

import json
import sys
import urllib.request

import numpy as np

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A dog chased the ball across the park.",
    "She bakes bread with rye flour every Sunday.",
    "Knead the dough for ten minutes before it rises.",
    "The train to Vienna leaves at half past nine.",
    "Tickets for the bus are sold by the driver.",
    "Heavy rain flooded the road to the harbour.",
    "Tomorrow it will be sunny and warm.",
    "The orchestra played a symphony by Brahms.",
    "He practises the violin for two hours a day.",
    "The bank raised the interest rate on loans.",
    "Shares fell after the company cut its forecast.",
    "The doctor prescribed rest and plenty of water.",
    "A vaccine protects children from measles.",
    "The telescope found a planet around a distant star.",
    "Astronauts repaired the solar panel of the station.",
    "The striker scored twice in the final.",
    "Her team won the relay at the championships.",
    "The function returns the index of the largest element.",
    "A compiler turns source code into machine code.",
]

url, query = sys.argv[1:]
with urllib.request.urlopen(f"{url}/v1/embeddings", json.dumps({"input": [*SENTENCES, query]}).encode()) as response:
    vectors = np.array([each["embedding"] for each in json.load(response)["data"]])
for index in np.argsort(vectors[:-1] @ vectors[-1])[:-4:-1]:
    print(f"{vectors[index] @ vectors[-1]:.3f} {SENTENCES[index]}")
