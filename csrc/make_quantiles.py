"""Write the quantile tables of normal initial values, for the core and for the reference.

Both files hold the same float32 numbers: csrc/quantiles.inc as hexadecimal literals and
src/shoal/rules/quantiles.npz as arrays. They are committed; run this only to change the tables,
which changes the initial values of every model (mpmath comes with torch):

    python csrc/make_quantiles.py

normal[i] = Phi^-1(clamp(i / 4096, 2^-14, 1 - 2^-14)), i = 0..4096.
truncated_normal[i] = Phi^-1(Phi(-2) + i / 4096 * (Phi(2) - Phi(-2))).
"""

from __future__ import annotations

from pathlib import Path

import mpmath
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
STEPS = 4096
LITERALS_PER_LINE = 24

Table = npt.NDArray[np.float32]


def probit(probability: mpmath.mpf) -> float:
    """Phi^-1, to 40 digits before it is rounded."""
    return float(mpmath.sqrt(2) * mpmath.erfinv(2 * probability - 1))


def normal_table() -> Table:
    tail = mpmath.mpf(1) / (1 << 14)
    shares = [min(max(mpmath.mpf(i) / STEPS, tail), 1 - tail) for i in range(STEPS + 1)]
    return np.array([probit(share) for share in shares], dtype=np.float32)


def truncated_table() -> Table:
    low, high = mpmath.ncdf(-2), mpmath.ncdf(2)
    inner = [probit(low + mpmath.mpf(i) / STEPS * (high - low)) for i in range(1, STEPS)]
    return np.array([-2.0, *inner, 2.0], dtype=np.float32)


def literal(value: np.float32) -> str:
    """Hexadecimal float literal of C++17, trailing zeros cut."""
    mantissa, exponent = float(value).hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}f"


def array(name: str, table: Table) -> str:
    literals = [literal(value) for value in table]
    lines = [
        ", ".join(literals[i : i + LITERALS_PER_LINE])
        for i in range(0, len(literals), LITERALS_PER_LINE)
    ]
    body = ",\n".join(lines)
    return f"inline constexpr float {name}[{len(table)}] = {{\n{body}}};\n"


def main() -> None:
    mpmath.mp.dps = 40
    normal, truncated = normal_table(), truncated_table()
    header = (
        "// Written by csrc/make_quantiles.py from the numbers in quantiles.npz; do not edit.\n"
    )
    text = header + array("NORMAL_QUANTILES", normal) + array("TRUNCATED_QUANTILES", truncated)
    (ROOT / "csrc" / "quantiles.inc").write_text(text)
    npz = ROOT / "src" / "shoal" / "rules" / "quantiles.npz"
    np.savez_compressed(npz, normal=normal, truncated_normal=truncated)


if __name__ == "__main__":
    main()
