"""Policy versions in the object store: what a run is, who may write a version, how one travels. docs/weights.md has
the format.

config.py      [weights] of a run file
run.py         run.json and the model's files, created once
lineage.py     claims, manifests, and the rules that make one trainer the writer
codec/         the change of a tile as bytes

the trainer
publisher.py   every rank: snapshot, encode, upload, commit
changes.py     a rank's rows against its baseline, as delta packs
full.py        a full state, streamed to rotating owners
drafts.py      one version's packs on every rank, until they are whole
anchors.py     full states in the background
shards.py      its view of the parameters: local rows, 16 bit
ranks.py       its view of the other ranks
upkeep.py      compactor.py and gc.py in a thread of rank 0

objects
packs.py       full packs: how a state is cut into safetensors objects, and which rank writes which
full_tiles.py  the tiles in them, and the digests by which they are read alone; hashed.py where those come from
deltas.py      delta packs: tiles and their table
ways.py        further ways to a version: skip deltas, anchors
compactor.py   writes skip deltas
layers.py      deltas laid over one another; replay.py a version's state beside no worker: for it and for the commands
garbage.py     what nobody needs any more (pure); gc.py announces and removes it

the reader (no torch)
subscriber.py  find, fetch, make a Hugging Face folder
plan.py        the cheapest path in bytes
follower.py    from what is here to the version that is wanted
fetch.py       parallel ranged gets, verified; whole.py packs on their way as wholes
needed.py      the same for who needs only some elements
shadow.py      one version's state as files, changed in place
readers.py     which versions a worker still needs

everybody
files.py       local files that are there whole or not at all
parallel.py    one function over many items, in threads

report.py, difference.py, check.py, estimate.py, peers.py, entropy.py, statefiles.py: for the commands
"""
