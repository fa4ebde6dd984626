"""Numbers with their nouns, and times."""


def counted(number: int, thing: str, things: str = "") -> str:
    """A number and its noun; `things` is an irregular plural.

    >>> counted(1, "Tick"), counted(0, "epoch"), counted(1438, "image"), counted(2, "class", "classes")
    ('1 Tick', '0 epochs', '1,438 images', '2 classes')
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def digits(value: float) -> str:
    """A metric with the digits that others of its kind have.

    >>> digits(98.6), digits(100.0), digits(2.5), digits(0.036054)
    ('98.60', '100.00', '2.500', '0.03605')
    """
    if not 1 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """Seconds in a readable unit.

    >>> duration(0.0032), duration(2.5), duration(64.8), duration(7320)
    ('3.20 ms', '2.5 s', '1 min 5 s', '2 h 2 min')
    """
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds >= 0.1 or seconds < 0.001 else f"{1000 * seconds:.2f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
