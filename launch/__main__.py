"""``crad-mesh``, also as ``python -m launch``: ready for Ctrl-C before anything heavy is imported."""

from __future__ import annotations

from crad_p2p.starting import leave_on_signals


def main() -> None:
    """Console entry point."""
    leave_on_signals("crad-mesh")
    from launch.cli import main as run

    run()


if __name__ == "__main__":
    main()
