"""Starting, stopping and restarting a training run: the processes around it, not what they compute.

A **supervisor** (:mod:`.supervisor`) starts a launcher (:mod:`.launchers`: torchpack's mpirun or torchrun), which starts one
:mod:`.rank_process` per rank, which starts the trainer. The rank process gives the trainer its environment, keeps what it
prints, and writes down how it ended, which no launcher tells. Everything lies in ``<run folder>/launch/`` (:mod:`.state`).
Standard library only: it must work where torch does not load. Above them :mod:`.progressive` runs one training after the other as
a stages file says (:mod:`.stages`, which reads YAML and so needs PyYAML).
"""
