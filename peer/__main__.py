"""``crad-peer``, also as ``python -m peer``: ready for Ctrl-C before anything heavy is imported."""

from __future__ import annotations

from crad_p2p.parent import end_with_named_parent
from crad_p2p.starting import leave_on_signals


def main() -> None:
    """Console entry point."""
    leave_on_signals("crad-peer")
    end_with_named_parent()
    from peer.cli import main as run

    run()


if __name__ == "__main__":
    main()
