"""Renderers of the three kinds of sensors, all looking at the same :class:`..world.Boxes` and :class:`..ground.Ground`."""
