"""MediaQueue: the images of prompts on their way from gateways to the encoder outputs on the ranks.

The tensors of an image are asked of the gateway of a sequence that needs them, once, arrive in pieces, and are sent
to the ranks before the plan that has them encoded. They are kept while a sequence may need them again, as far as
there is room, so that an evicted output or a replaced rank costs no second upload.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ....proto.block_tables import IntArray
from ....proto.config import EngineConfig
from ....proto.errors import InvalidRequest, QuireError, ReplicaUnavailable
from ....proto.media import MediaAssembly, MediaItem
from ....proto.step import EncoderInput
from ....proto.stream import MediaUpload, MediaWanted
from ...kv.encoder_cache import EncoderCache
from ...sequences.sequence import Sequence

# Bytes of tensors that are held or awaited; an image that the next sequence in turn needs may exceed them.
MAX_HELD_BYTES = 1 << 30
# Time without a piece after which an image that was asked for is given up.
UPLOAD_TIMEOUT_S = 60.0
# Names that are remembered beside those in use.
_MAX_UNUSED_NAMES = 1024


@dataclass(slots=True)
class _Upload:
    """Tensors that are awaited or held.

    Attributes:
        num_bytes: that are reserved for them.
        asker: the sequence whose gateway was asked; None once all are there.
        asked_at: when it was asked, or the latest piece came.
        assembly: None before the first piece.
        is_sent: the ranks have got them, so that they are likely not needed any more.
    """

    num_bytes: int
    asker: Sequence | None
    asked_at: float
    assembly: MediaAssembly | None = None
    is_sent: bool = False

    @property
    def is_ready(self) -> bool:
        return self.assembly is not None and self.assembly.is_complete


class MediaQueue:
    """Images of the sequences that have not ended.

    Attributes:
        cache: the encoder outputs on the ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        vision = config.model.vision
        self._vision, self._cuts_images = vision, vision is None or vision.cuts_images
        self._cuts_prompts = not config.model.sees_whole_prompt
        self.cache = EncoderCache(
            config.encoder_cache_bytes, config.encoder_row_bytes, config.encoder_step_work
        )
        self._ids: dict[tuple[bytes, bytes], int] = {}  # root and digest |-> media_id
        self._num_ids = 0
        self._users: dict[bytes, dict[int, Sequence]] = {}  # digest |-> seq_id |-> sequence
        self._uploads: dict[bytes, _Upload] = {}  # digest |-> tensors, those sent longest ago first
        self._excess: bytes | None = None  # digest of the image that exceeds MAX_HELD_BYTES
        self._asks: list[tuple[Sequence, bytes]] = []
        self._begun: dict[int, bytes] = {}  # media_id |-> digest of images of which the ranks have a part
        self._chosen: list[int] = []  # of these, those that the next plan begins
        self._inputs: list[EncoderInput] = []

    @property
    def num_held_bytes(self) -> int:
        """Return the bytes of the tensors that are held or awaited."""
        return sum(upload.num_bytes for upload in self._uploads.values())

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """Register the images of a sequence that came."""
        if not sequence.media:
            return
        self._drop_names()
        names = [(sequence.root, item.digest) for item in sequence.media]
        for name in names:
            if name not in self._ids:
                self._num_ids += 1
                self._ids[name] = self._num_ids
            self._users.setdefault(name[1], {})[sequence.seq_id] = sequence
        sequence.media_ids = tuple(self._ids[name] for name in names)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, and the tensors that no other needs."""
        for digest in {item.digest for item in sequence.media}:
            users = self._users[digest]
            del users[sequence.seq_id]
            upload = self._uploads.get(digest)
            if not users:
                del self._users[digest]
                self._cancel(digest)
                self._free(digest)
            elif upload is not None and upload.asker is sequence:
                self._free(digest)  # the next sequence in turn asks its own gateway

    def ask(self, sequence: Sequence, num_cached_tokens: int, now: float) -> None:
        """Ask for the images of a sequence that came, except those of its cached prefix, as far as there is room."""
        for item, media_id in zip(sequence.media, sequence.media_ids, strict=True):
            is_there = media_id in self.cache or self.cache.has_begun(media_id)
            if item.end > num_cached_tokens and not is_there:
                self._ask(sequence, item, now, is_next=False)

    def users_of(self, media_ids: Collection[int]) -> list[Sequence]:
        """Return the sequences that have one of some images."""
        users = (each for users in self._users.values() for each in users.values())
        return [each for each in users if not set(media_ids).isdisjoint(each.media_ids)]

    # Plans

    def between_images(self, sequence: Sequence, ends: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the ends of chunks at which a chunk may end; a model may allow none within an image."""
        if self._cuts_images or not sequence.media:
            return ends
        return tuple(end for end in ends if not any(item.start < end < item.end for item in sequence.media))

    def begin_plan(self) -> None:
        self.cache.begin_plan()

    def chunk_len(self, sequence: Sequence, start: int, num_tokens: int, now: float) -> int:
        """Return how many tokens from `start` on the next plan may compute, at most `num_tokens`.

        It ends before an image that cannot be read yet; there are none if the prompt may not be cut. The plan encodes
        those that were not before, or the next part of them.
        """
        end = start + num_tokens
        for item, media_id in zip(sequence.media, sequence.media_ids, strict=True):
            if item.end <= start:
                continue
            if item.start >= end:
                break
            is_cut = not self._cuts_images and item.end > end
            if is_cut or not self._may_read(sequence, item, media_id, now):
                end = item.start
                break
        if not self._cuts_prompts and start < sequence.num_prompt_tokens > end:
            return 0
        return max(0, end - start)

    def _may_read(self, sequence: Sequence, item: MediaItem, media_id: int, now: float) -> bool:
        if media_id in self.cache:
            self.cache.pin(media_id)
            return True
        has_begun = self.cache.has_begun(media_id)
        upload = self._uploads.get(item.digest)
        if not has_begun and (upload is None or not upload.is_ready):
            self._ask(sequence, item, now, is_next=True)
            return False
        assert self._vision is not None, "a model that reads no images has one"
        is_whole = self.cache.encode(media_id, item.num_embeddings, self._vision.work(item))
        if not has_begun and (is_whole or self.cache.has_begun(media_id)):
            assert upload is not None, "an image is begun without its tensors"
            self._begun[media_id] = item.digest
            self._chosen.append(media_id)
            upload.is_sent = False
        return is_whole

    def has_begun_for(self, sequence: Sequence) -> bool:
        """Return whether a part of one of a sequence's images is encoded."""
        return any(map(self.cache.has_begun, sequence.media_ids))

    @property
    def is_encoding(self) -> bool:
        """Return whether the next plan has images encoded."""
        return self.cache.is_encoding

    def take_orders(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return StepPlan.media_drops, encodes and encode_shares of the plan that is made now; see `take_inputs`."""
        orders = self.cache.take_orders()
        for media_id in self._chosen:
            digest = self._begun[media_id]
            upload = self._uploads.pop(digest)
            assert upload.assembly is not None, "an image is encoded before its tensors are there"
            self._inputs.append(EncoderInput(media_id, upload.assembly.layout, upload.assembly.data))
            upload.is_sent = True
            self._uploads[digest] = upload
            if self._excess == digest:
                self._excess = None
        self._chosen = []
        if self._begun:
            self._begun = {each: own for each, own in self._begun.items() if self.cache.has_begun(each)}
        return orders

    def take_inputs(self) -> list[EncoderInput]:
        """Return what the ranks must get before the latest plan."""
        inputs, self._inputs = self._inputs, []
        return inputs

    def reset(self) -> None:
        """Forget the encoder outputs: the ranks have none. The tensors are kept."""
        self.cache.reset()
        self._inputs, self._begun, self._chosen = [], {}, []

    # Uploads

    def take_asks(self) -> list[tuple[bytes, MediaWanted]]:
        """Return the messages that ask gateways for images."""
        if not self._asks:
            return []
        asks, self._asks = self._asks, []
        wanted: dict[int, tuple[Sequence, list[bytes]]] = {}
        for sequence, digest in asks:
            wanted.setdefault(sequence.seq_id, (sequence, []))[1].append(digest)
        return [(each.gateway, MediaWanted(each.handle, tuple(digests))) for each, digests in wanted.values()]

    def receive(self, message: MediaUpload, now: float) -> tuple[list[Sequence], QuireError] | None:
        """Take a piece of an image; one that nobody waits for is dropped.

        Returns:
            The sequences that cannot go on, and why; None if there are none.
        """
        upload = self._uploads.get(message.digest)
        if upload is None or upload.is_ready:
            return None
        try:
            if upload.assembly is None:
                upload.assembly = MediaAssembly(message.layout)
            if upload.assembly.layout != message.layout:
                raise ValueError("the pieces of an image have different layouts")
            if upload.assembly.num_bytes > upload.num_bytes:
                raise ValueError(
                    f"an image has {upload.assembly.num_bytes} bytes, was announced with {upload.num_bytes}"
                )
            upload.assembly.add(message.offset, message.data)
        except ValueError as error:
            users = list(self._users[message.digest].values())
            return users, InvalidRequest("media", str(error))
        upload.asked_at = now
        if upload.assembly.is_complete:
            upload.asker = None
        return None

    def expire(self, now: float) -> Iterable[Sequence]:
        """Return the sequences whose gateways have not sent an image in time."""
        if not self._uploads:
            return ()
        return {
            upload.asker.seq_id: upload.asker
            for upload in self._uploads.values()
            if upload.asker is not None and now - upload.asked_at > UPLOAD_TIMEOUT_S
        }.values()

    def check_integrity(self, alive: Iterable[Sequence]) -> None:
        """Raise AssertionError if the images are not those of the sequences that have not ended."""
        self.cache.check_integrity()
        expected: dict[bytes, set[int]] = {}
        for sequence in alive:
            for item, media_id in zip(sequence.media, sequence.media_ids, strict=True):
                expected.setdefault(item.digest, set()).add(sequence.seq_id)
                assert media_id <= self._num_ids, "an image has a name that was never given"
        assert expected == {digest: set(users) for digest, users in self._users.items()}, (
            "images are kept for other sequences than those that have them"
        )
        assert self._uploads.keys() <= expected.keys(), "tensors are held that no sequence needs"
        excess = self._uploads[self._excess].num_bytes if self._excess in self._uploads else 0
        assert self.num_held_bytes - excess <= MAX_HELD_BYTES or len(self._uploads) == 1, (
            "too many tensors are held"
        )

    def _ask(self, sequence: Sequence, item: MediaItem, now: float, *, is_next: bool) -> None:
        """Ask for the tensors of an image that are neither there nor awaited, if there is room.

        Args:
            is_next: a sequence in turn needs them; one such image may exceed the room.
        """
        if item.digest in self._uploads:
            return
        room = MAX_HELD_BYTES - item.num_bytes
        for digest in [digest for digest, upload in self._uploads.items() if upload.is_sent]:
            if self.num_held_bytes <= room:
                break
            self._free(digest)
        if self._uploads and self.num_held_bytes > room:
            if not is_next or self._excess is not None:
                return
            self._excess = item.digest
        self._uploads[item.digest] = _Upload(item.num_bytes, sequence, now)
        self._asks.append((sequence, item.digest))

    def _cancel(self, digest: bytes) -> None:
        """Stop encoding an image that nobody needs any more."""
        for media_id in [each for each, begun in self._begun.items() if begun == digest]:
            self.cache.cancel(media_id)
            del self._begun[media_id]
            if media_id in self._chosen:
                self._chosen.remove(media_id)

    def _free(self, digest: bytes) -> None:
        """Drop tensors."""
        if self._uploads.pop(digest, None) is not None and self._excess == digest:
            self._excess = None
        self._asks = [ask for ask in self._asks if ask[1] != digest]

    def _drop_names(self) -> None:
        """Bound the names: most images are never seen again."""
        if len(self._ids) <= 2 * (len(self._users) + len(self.cache)) + _MAX_UNUSED_NAMES:
            return
        used = {
            media_id
            for users in self._users.values()
            for each in users.values()
            for media_id in each.media_ids
        }
        self._ids = {
            name: media_id
            for name, media_id in self._ids.items()
            if media_id in used or media_id in self.cache
        }


def not_uploaded(sequence: Sequence) -> QuireError:
    """Return the error of a sequence whose gateway has not sent an image."""
    return ReplicaUnavailable(
        f"request {sequence.request_id}: its gateway did not send an image within {UPLOAD_TIMEOUT_S:g} s"
    )
