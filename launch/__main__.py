"""``crad-mesh``, also as ``python -m launch``: ready for Ctrl-C before anything heavy is imported."""

from __future__ import annotations

from crad_p2p.parent import end_with_named_parent
from crad_p2p.starting import leave_on_signals


def main() -> None:
    """Console entry point."""
    leave_on_signals("crad-mesh")
    end_with_named_parent()
    from launch.cli import main as run

    run()


if __name__ == "__main__":
    main()
