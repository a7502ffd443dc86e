"""How long tests wait for what shall be quick. A machine that others use may stand still for seconds at any moment, so
a limit only tells what is quick from what would never end; where a test counts work, it counts processor time.
"""

from __future__ import annotations

SOON_S = 20.0
