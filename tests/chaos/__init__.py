"""Two families. The control plane:

hooks/         run first in every process under test: named points to die at, and a log that is the test's own
evidence.py    what must be true of a run, from that log, the manifests and the spool; no counter of the product
lives.py       stories: real processes killed at named points, one after another
storm.py       a run under a seeded schedule of faults.py, for as long as is asked for
socket_proxy.py, s3_proxy.py, small_disk.py    what is between and below the processes of a storm
prompts.py     prompts that are long or short by their ordinal
delivery.py    orchestrator, trainer and worker in one process, ended at every point; power cuts; zombies
bias.py        the same with long and short prompts, and deaths without end
fuzz.py        hostile bytes

The crash matrix of the weights: real processes, real SIGKILL, a real S3 server, and never a wrong byte.

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
