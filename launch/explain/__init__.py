"""``crad-mesh explain``: for one image, who taught and with what weight, and who was dropped for which reason.

``source`` finds the snapshots of a run and runs them, ``image`` the image, :mod:`crad_p2p.explanation` says what the
method makes of it, ``view`` and ``figure`` show it, and ``command`` puts all of them together.
"""
