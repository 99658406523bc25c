"""The crash matrix: real processes, real SIGKILL, a real S3 server, and never a wrong byte.

toy.py         the weights: every version's exact bits follow from its place in the lineage
points.py      the points of a process at which it can be killed, by name; requests half sent, writes half done
forks.py       a warm process that forks a real one per life: hundreds of deaths cost seconds
ranked.py      the ranks of a trainer: how they meet, who holds which rows, points of what they say to each other
publisher.py   a trainer without a model: claims, resumes, publishes; compacts and collects garbage
reader.py      a worker without an engine: fetches, and says the hash of what it would serve
guards.py      the guards of the product, each of which a reader or publisher can be started without
settings.py    packs, spans and limits so small that everything happens within a few versions
world.py       a run, its processes and the checker that knows what every version must be
damage.py      objects truncated, flipped, swapped, missing, stale
matrix.py      the cases, and `python -m tests.chaos.matrix`, which plays and counts them
"""
