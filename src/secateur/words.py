"""Numbers with their nouns."""


def counted(number: int, thing: str, things: str = "") -> str:
    """A number and its noun; `things` is an irregular plural.

    >>> counted(1, "Tick"), counted(0, "epoch"), counted(1438, "image"), counted(2, "class", "classes")
    ('1 Tick', '0 epochs', '1,438 images', '2 classes')
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
