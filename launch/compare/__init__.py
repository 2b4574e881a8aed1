"""``crad-mesh compare``: many runs that differ in method, data set, seed and number of peers, and nothing else.

``plan`` says what runs there are, ``run`` is the process of one of them, ``session`` does those that are missing by an
engine of ``launch.engines`` and writes what ``tables``, ``series`` and ``figures`` make of the results. ``choice``
makes the engine that was asked for.
"""
