"""Batches of image files on a GPU that decodes JPEGs, made while it computes other things.

Threads read files into memory that the GPU can read by itself; one thread has it decode what is plain; another one has
it resize whole groups of images. What the GPU's decoder does not take goes through Pillow, in the reading threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from secateur.data.decode import MAX_BYTES, Decoder, plain_jpeg_size
from secateur.data.views import Packed, View, pack, render_batch, to_device, together

if TYPE_CHECKING:
    from secateur.data.photos import Batch, Photos

AHEAD = 3
"""Batches that are read, decoded or ready before they are needed."""
READERS = 4
"""Threads that read files; more of them would keep the others from running."""
READ_AT_ONCE = 16
"""Files that a thread reads into one buffer."""
BUFFER = 1 << 21
"""Bytes of a buffer at first."""

Request = tuple[int, list[float]]
"""An image's index, and the random numbers for its view."""


class Jpeg(NamedTuple):
    """A JPEG that the GPU can decode, and what to show of it."""

    content: Tensor
    shape: tuple[int, int]
    """Height and width."""
    view: View
    request: Request


class Read(NamedTuple):
    """Files that were read together: plain JPEGs as they are, and the pixels of other images."""

    files: list[Jpeg | Tensor]
    buffer: Tensor
    """Holds the JPEGs."""


class Decoded(NamedTuple):
    """The images of a batch, those of alike sizes together, and the place of each in the batch."""

    parts: list[tuple[Packed, list[View]] | Tensor]
    places: list[int]


class GpuReader:
    """Makes the batches of one pass over photographs."""

    def __init__(self, photos: Photos, decode: Decoder) -> None:
        self.photos, self.decode = photos, decode
        self.cuda = photos.device.type == "cuda"
        # With the higher priority a few small kernels need not wait for all those of the network that are queued.
        self.streams = [torch.cuda.Stream(photos.device, priority=-1) for _ in range(2)] if self.cuda else []
        self.buffers: deque[Tensor] = deque()
        """Free ones: memory is slow when it is new, and slower to pin."""

    def __call__(self, plan: Iterator[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch with its pixels as bytes: image x size x size x colour."""
        readers = ThreadPoolExecutor(READERS, "secateur-read")
        decoder, renderer = (ThreadPoolExecutor(1, f"secateur-{name}") for name in ("decode", "render"))
        waiting: deque[tuple[Batch, Future[tuple[Tensor, Any]]]] = deque()
        try:
            for batch in plan:
                requests = list(zip(batch.indices, batch.numbers, strict=True))
                some = [requests[start : start + READ_AT_ONCE] for start in range(0, len(requests), READ_AT_ONCE)]
                read = [readers.submit(self.read, part) for part in some]
                waiting.append((batch, renderer.submit(self.render, decoder.submit(self.decode_all, read))))
                if len(waiting) > AHEAD:
                    yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())
        finally:
            for pool in (renderer, decoder, readers):
                pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, batch: Batch, made: Future[tuple[Tensor, Any]]) -> tuple[Batch, Tensor]:
        pixels, event = made.result()
        if self.cuda:
            current = torch.cuda.current_stream(self.photos.device)
            current.wait_event(event)
            pixels.record_stream(current)
        return batch, pixels

    def read(self, requests: Sequence[Request]) -> Read:
        """Read files, and decode those with Pillow that the GPU does not."""
        photos = self.photos
        try:
            buffer = self.buffers.pop()
        except IndexError:
            buffer = self._new_buffer(BUFFER)
        end = 0
        found: list[tuple[slice, tuple[int, int]] | Tensor] = []
        for index, numbers in requests:
            start = end
            with photos.layout.reading(photos.paths[index]):
                buffer, end = self._append(photos.paths[index], buffer, start)
            size = plain_jpeg_size(buffer.numpy().data[start:end])
            if size is None:
                found.append(photos.pixels(index, numbers))
                end = start
            else:
                found.append((slice(start, end), size))
        files: list[Jpeg | Tensor] = []
        for request, file in zip(requests, found, strict=True):
            if not isinstance(file, Tensor):
                place, (width, height) = file
                view = photos.crops.view(photos.part_of(request[0], width, height), request[1])
                file = Jpeg(buffer[place], (height, width), view, request)
            files.append(file)
        return Read(files, buffer)

    def _append(self, path: str, buffer: Tensor, start: int) -> tuple[Tensor, int]:
        """Read a file to this place of the buffer, or of a larger one; gives the buffer, and where the file ends."""
        end = start
        with Path(path).open("rb", buffering=0) as file:
            while count := file.readinto(buffer.numpy().data[end:]):
                end += count
                if end - start > MAX_BYTES:
                    raise ValueError(f"more than {MAX_BYTES:,} bytes")
                if end == buffer.numel():
                    larger = self._new_buffer(2 * end)
                    larger[:end] = buffer
                    buffer = larger
        return buffer, end

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.cuda)

    def decode_all(self, read: Sequence[Future[Read]]) -> Decoded:
        """Decode the images of a batch."""
        done = [future.result() for future in read]
        files = list(enumerate(file for each in done for file in each.files))
        parts: list[tuple[Packed, list[View]] | Tensor] = [file[None] for _, file in files if isinstance(file, Tensor)]
        places = [place for place, file in files if isinstance(file, Tensor)]
        jpegs = [(place, file) for place, file in files if isinstance(file, Jpeg)]
        for group in together([file.shape for _, file in jpegs]):
            chosen = [jpegs[i][1] for i in group]
            places += [jpegs[i][0] for i in group]
            try:
                parts.append((self._decode_group(chosen), [file.view for file in chosen]))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                # One of them is damaged, or this decoder cannot read it after all. It may not be done with the others.
                if self.cuda:
                    torch.cuda.synchronize(self.photos.device)
                parts.append(torch.stack([self.photos.pixels(*file.request) for file in chosen]))
        self.buffers.extend(each.buffer for each in done if each.buffer.numel() <= 4 * BUFFER)
        return Decoded(parts, places)

    def _decode_group(self, files: Sequence[Jpeg]) -> Packed:
        with torch.cuda.stream(self.streams[0]) if self.cuda else nullcontext():
            images = pack(self.decode([file.content for file in files]))
        if self.cuda:
            # The decoder reads and writes on a stream of its own, and does not wait for what others do with its memory.
            self.streams[0].synchronize()
            images.pixels.record_stream(self.streams[1])
        return images

    def render(self, decoded: Future[Decoded]) -> tuple[Tensor, Any]:
        """The pixels of a batch, and the event after which they can be used."""
        parts, places = decoded.result()
        photos = self.photos
        with torch.cuda.stream(self.streams[1]) if self.cuda else nullcontext():
            pixels = [
                to_device(part, photos.device) if isinstance(part, Tensor) else render_batch(*part, photos.crops.size)
                for part in parts
            ]
            order = to_device(torch.tensor(places).argsort(), photos.device)
            return torch.cat(pixels)[order], self.streams[1].record_event() if self.cuda else None
