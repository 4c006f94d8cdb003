"""The parts of examples/serve.py, in the order a request meets them.

api         HTTP: what is asked for becomes a Request, its pieces become the answer
text        bytes or a checkpoint's tokenizer; text as it grows, and where it stops
scheduler   rank 0: which request runs on which rank
engine      every rank: one step after another
batch       one rank's requests under the model
"""
