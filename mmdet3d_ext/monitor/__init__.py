"""Seeing a run: what its log says about progress, losses, health and evaluation; in the terminal and as one HTML page.

Everything is read from files (``<time>.log.json`` of mmcv's runner, ours or the reference's, and what lies beside it), so a run
on another machine, a run that died and a run of another project can be looked at alike. Nothing here needs torch.
"""
