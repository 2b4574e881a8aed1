"""CRAD: class-wise reliability-aware distillation between peers that keep their images.

This package is the method. It runs with no network at all (:mod:`crad_p2p.simulation`); the service that
moves snapshots between hosts is the package ``peer``. Nothing heavy is imported here, because the service
uses the torch-free modules (``federation``, ``manifest``, ``snapshot``, ``errors``).
"""

__version__ = "0.1.0"
