"""Batches of image files on a GPU that decodes JPEGs, made while it computes other things.

Processes read the files, and decode those that the GPU's decoder does not take. One thread has the GPU decode the rest,
and another one has it resize whole groups of images. Reading in threads would make all of them wait for Python's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from secateur.data.decode import MAX_BYTES, Decoder, check_plain, plain_jpeg_size
from secateur.data.views import Packed, View, pack, render_batch, to_device, together
from secateur.data.workers import in_workers

if TYPE_CHECKING:
    from secateur.data.photos import Batch, Photos

AHEAD = 3
"""Batches that are decoded or ready before they are needed."""
AT_ONCE = 32
"""Files that a process reads at a time."""
BYTES = 1 << 18
"""Of shared memory for each file; what finds no place there is read when it is needed."""


class Part(NamedTuple):
    """Some of the images of a batch."""

    indices: list[int]
    numbers: list[list[float]]


class Jpeg(NamedTuple):
    """A JPEG that the GPU decodes, and what to show of it."""

    place: int
    """Among the images of the part."""
    content: slice | None
    """In shared memory, if it fits."""
    shape: tuple[int, int]
    """Height and width."""
    view: View


def read_part(photos: Photos, part: Part, memory: Tensor) -> tuple[list[int], list[Jpeg]]:
    """Leave the pixels of some images in memory, and after them plain JPEGs.

    Gives the places of the former among the images of the part, and the latter.
    """
    pixels, room = _divided(photos, memory)
    contents, end = room.numpy().data, 0
    decoded, jpegs = list[int](), list[Jpeg]()
    for place, (index, numbers) in enumerate(zip(*part, strict=True)):
        path, content = photos.paths[index], None
        with photos.layout.reading(path):
            check_plain(path)
            # A Path takes longer than the file.
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                read = slice(end, end + file.readinto(contents[end:]))
            if read.stop < len(contents):
                content, size = read, plain_jpeg_size(contents[read])
            else:
                size = plain_jpeg_size(photos.layout.read_bytes(Path(path), MAX_BYTES))
        if size is None:
            pixels[len(decoded)] = photos.pixels(index, numbers)
            decoded.append(place)
            continue
        view = photos.crops.view((0, 0, *size), numbers)
        jpegs.append(Jpeg(place, content, (size[1], size[0]), view))
        end = content.stop if content is not None else end
    return decoded, jpegs


def _divided(photos: Photos, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the pixels of a part's images, and for files."""
    size = photos.crops.size
    end = AT_ONCE * size * size * 3
    return memory[:end].view(AT_ONCE, size, size, 3), memory[end:]


class Decoded(NamedTuple):
    """The images of a batch, those of alike sizes together, and the place of each in the batch."""

    parts: list[tuple[Packed, list[View]] | Tensor]
    places: list[int]
    event: Any
    """After which they can be used."""


class GpuReader:
    """Makes the batches of one pass over photographs."""

    def __init__(self, photos: Photos, decode: Decoder) -> None:
        self.photos, self.decode = photos, decode
        self.cuda = photos.device.type == "cuda"
        # With the higher priority a few small kernels need not wait for all those of the network that are queued.
        self.streams = [torch.cuda.Stream(photos.device, priority=-1) for _ in range(2)] if self.cuda else []
        self.held: tuple[list[Tensor], Any] | None = None

    def __call__(self, plan: Iterator[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch with its pixels as bytes: image x size x size x colour."""
        photos = self.photos
        batches: deque[Batch] = deque()
        parts_of_a_batch = -(-photos.batch_size // AT_ONCE)
        read = in_workers(
            partial(read_part, replace(photos, device=torch.device("cpu"))),
            self._parts(plan, batches),
            photos.num_workers,
            size=AT_ONCE * (BYTES + 3 * photos.crops.size**2),
            used=(AHEAD + 1) * parts_of_a_batch,
        )
        decoder, renderer = (ThreadPoolExecutor(1, f"secateur-{name}") for name in ("decode", "render"))
        waiting: deque[tuple[Batch, Future[tuple[Tensor, Any]]]] = deque()
        try:
            while parts := list(islice(read, 1)):
                batch = batches.popleft()
                parts += islice(read, -(-len(batch.indices) // AT_ONCE) - 1)
                waiting.append((batch, renderer.submit(self.render, decoder.submit(self.decode_all, parts))))
                if len(waiting) > AHEAD:
                    yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())
        finally:
            for pool in (renderer, decoder):
                pool.shutdown(wait=False, cancel_futures=True)
            read.close()

    def _parts(self, plan: Iterator[Batch], batches: deque[Batch]) -> Iterator[Part]:
        for batch in plan:
            batches.append(batch)
            for start in range(0, len(batch.indices), AT_ONCE):
                some = slice(start, start + AT_ONCE)
                yield Part(batch.indices[some], batch.numbers[some])

    def _finished(self, batch: Batch, made: Future[tuple[Tensor, Any]]) -> tuple[Batch, Tensor]:
        pixels, event = made.result()
        if self.cuda:
            current = torch.cuda.current_stream(self.photos.device)
            current.wait_event(event)
            pixels.record_stream(current)
        return batch, pixels

    def decode_all(self, read: Sequence[tuple[Part, tuple[list[int], list[Jpeg]], Tensor]]) -> Decoded:
        """Decode the images of a batch."""
        parts: list[tuple[Packed, list[View]] | Tensor] = []
        places: list[int] = []
        jpegs: list[tuple[int, Part, Jpeg, Tensor]] = []
        for number, (part, (decoded, others), memory) in enumerate(read):
            pixels, room = _divided(self.photos, memory)
            if decoded:
                # A copy, since the memory is used again.
                parts.append(pixels[: len(decoded)].pin_memory() if self.cuda else pixels[: len(decoded)].clone())
            places += [number * AT_ONCE + place for place in decoded]
            jpegs += [(number * AT_ONCE + file.place, part, file, room) for file in others]
        for group in together([file.shape for _, _, file, _ in jpegs]):
            chosen = [jpegs[i] for i in group]
            places += [place for place, *_ in chosen]
            try:
                images = self._decode_group([self._content(part, file, room) for _, part, file, room in chosen])
                parts.append((images, [file.view for _, _, file, _ in chosen]))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                # One of them is damaged, or this decoder cannot read it after all. It may not be done with the others.
                if self.cuda:
                    torch.cuda.synchronize(self.photos.device)
                careful = [
                    self.photos.pixels(part.indices[file.place], part.numbers[file.place])
                    for _, part, file, _ in chosen
                ]
                parts.append(torch.stack(careful))
        return Decoded(parts, places, self.streams[0].record_event() if self.cuda else None)

    def _content(self, part: Part, file: Jpeg, room: Tensor) -> Tensor:
        if file.content is not None:
            return room[file.content]
        content = self.photos.layout.read_bytes(Path(self.photos.paths[part.indices[file.place]]), MAX_BYTES)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def _decode_group(self, contents: list[Tensor]) -> Packed:
        with torch.cuda.stream(self.streams[0]) if self.cuda else nullcontext():
            images = self.decode(contents)
            packed = pack(images)
        if self.cuda:
            packed.pixels.record_stream(self.streams[1])
            # The decoder writes on a stream of its own, and does not wait for what others do with its memory: images
            # are held until they are copied, while the next ones are decoded.
            if self.held is not None:
                self.held[1].synchronize()
            self.held = images, self.streams[0].record_event()
        return packed

    def render(self, made: Future[Decoded]) -> tuple[Tensor, Any]:
        """The pixels of a batch, and the event after which they can be used."""
        parts, places, decoded = made.result()
        photos = self.photos
        with torch.cuda.stream(self.streams[1]) if self.cuda else nullcontext():
            if self.cuda:
                self.streams[1].wait_event(decoded)
            pixels = [
                to_device(part, photos.device) if isinstance(part, Tensor) else render_batch(*part, photos.crops.size)
                for part in parts
            ]
            order = to_device(torch.tensor(places).argsort(), photos.device)
            return torch.cat(pixels)[order], self.streams[1].record_event() if self.cuda else None
