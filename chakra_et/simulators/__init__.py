"""From a set of .et files to a simulation that runs, at any number of data-parallel ranks.

In goes a set (NAME.0.et …, NAME_comm_groups.json and, where there is one, NAME_manifest.json), read by
``sets``.

``astra`` writes a folder that ASTRA-sim runs: ``trim`` and ``fill`` deal with missing ranks, ``prepare``
makes each rank's nodes what the simulator runs, ``networks`` reads the topology, ``dimensions`` has
ASTRA-sim's network, ``expected`` replays, ``bundle`` and ``texts`` write, ``check_log`` compares a log.

``scale`` writes a set of more or fewer ranks: ``mesh`` has the places of ranks and their groups, ``copies``
and ``ranks`` make new ranks of captured ones, ``spread`` varies their times, ``fit`` finds the network of the
capture, ``replicas`` puts in what one replica does without.

``remodel`` makes the captured ranks those of another model. ``operators`` has the operators of a rank as a
tree, ``blocks`` finds its repeated blocks, ``gradients`` what its backward passes accumulate and reduce.
``layers`` changes the number of blocks, with ``unroll`` (nodes and dependencies), ``numbers`` (what they
name) and ``buckets`` (collectives of gradients); ``tensors`` changes batch and sequence, ``sharding`` the
shards of tensor parallelism, ``stages`` cuts stages.

``edit`` makes new traces from given ones. ``examples`` unpacks the sets in ``data``.
"""
