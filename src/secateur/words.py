"""How numbers of things are said."""


def counted(number: int, thing: str, things: str = "") -> str:
    """The number and what it counts; `things` where more than one is not the word with an s.

    >>> counted(1, "Tick"), counted(0, "epoch"), counted(1438, "image"), counted(2, "class", "classes")
    ('1 Tick', '0 epochs', '1,438 images', '2 classes')
    """
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
