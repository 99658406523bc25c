"""Policy versions in the object store: what a run is, who may write a version, how one travels.

run.py         run.json and the model's files, created once
lineage.py     claims, manifests, and the rules that make one trainer the writer
packs.py       how a state is cut into safetensors objects, and which rank writes which
publisher.py   every rank: snapshot, stream to the owners' packs, commit
shards.py      its view of the parameters: local rows, 16 bit
ranks.py       its view of the other ranks
subscriber.py  find, fetch, verify, make a Hugging Face folder (no torch)
files.py       local files that are there whole or not at all
"""
