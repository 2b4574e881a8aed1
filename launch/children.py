"""What the processes of a local mesh have in common."""

from __future__ import annotations

import os
import signal

from crad_p2p.parent import parent_entry


def environment(number: signal.Signals) -> dict[str, str]:
    """Of a child that gets this signal when this process has ended, however that ends.

    Without the options of a single peer, which the user may have set for another purpose.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CRAD_")}
    return {**inherited, **parent_entry(number)}
