"""Start mlx-vlm's server with a PrefixCache in place of its own prefix cache (APC). Takes the server's command line:
    APC_ENABLED=1 python examples/guests/mlx_vlm.py --model MODEL

The variables for the sizes of APC in memory and on disk keep their meaning. Made for mlx-vlm 0.7.10.
"""

import sys
from typing import Any

sys.path.pop(0)  # This folder, in which this file has the guest's name.

import numpy as np
from mlx_lm.models import cache as originals
from mlx_vlm import apc, apc_coordinator, server
from mlx_vlm.models import cache as copies

from radixcache import DiskStore, PrefixCache, RadixCacheError, register_adapter

for name in ("ArraysCache", "CacheList", "ChunkedKVCache", "KVCache", "QuantizedKVCache", "RotatingKVCache"):
    register_adapter(getattr(copies, name), getattr(originals, name))
HASHES, semantic_hash, gpu_embed = 1 << 64, apc.semantic_extra_hash, server.ResponseGenerator._gpu_embed


def embed(self: Any, inputs: dict[str, Any], images: Any = None, apc_semantic_hash: Any = None) -> Any:
    """Hash all that describes images, audio and video, also the layout of their patches, apart from the tenant."""
    size, key = inputs["input_ids"].shape[-1], apc_semantic_hash  # What is as long as the text describes the text.
    media = {name: of for name, of in inputs.items() if "pixel" in name or size not in getattr(of, "shape", ())}
    more = 0 if key is None else semantic_hash(media=media) % HASHES - key % HASHES
    return gpu_embed(self, inputs, images, key if key is None else key + more)


class Coordinator(apc_coordinator.APCCoordinator):
    enabled = property(lambda self: self.manager.radix is not None)

    def __init__(self, manager: Any, model: Any) -> None:
        super().__init__(manager, model)
        self.image_ids = [*apc.multimodal_token_ids_from_config(getattr(model, "config", None))]
        self.stops: dict[tuple[int, ...], list[int]] = {}
        if not hasattr(manager, "radix"):
            disk, manager.disk, manager.radix, size = manager.disk, None, None, max(1, manager.memory_max_bytes)
            store = disk and DiskStore(disk.dir / "radixcache", budget_bytes=disk.max_bytes or 2**60, write_on="close")
            try:
                cache = PrefixCache(caches=self.fresh_cache, budget_bytes=size, store=store, identity="mlx-vlm")
                manager.radix, manager.clear, manager.close = cache, cache.clear, cache.flush
            except RadixCacheError as error:
                print("No prefix cache:", error, file=sys.stderr)

    def named(self, tokens: list[int], extra_hash: int) -> dict[str, Any]:
        other, image = divmod(extra_hash, HASHES)
        places = np.isin(tokens, self.image_ids) & (image > 0)
        keys = np.where(places, image >> 1 | 1 << 62, np.array(tokens, np.int64))
        return {"keys": keys, "namespace": str(other if places.any() or not image else extra_hash)}

    def lookup(self, tokens: list[int], *, extra_hash: int, suffix_is_text_only: Any, **_: Any) -> Any:
        names, ends = self.named(tokens, extra_hash), getattr(server.runtime.response_generator, "stop_tokens", ())
        caches, rest = self.manager.radix.fetch(tokens, **names)
        marks = [at for at in range(1, len(tokens)) if tokens[at - 1] in ends]  # the ends of messages
        offsets = self.manager.radix.insert_offsets(tokens, **names, marks=marks[:1] + marks[-4:])
        self.stops[tuple(tokens)] = [*offsets, len(tokens) - 1]
        found = {"warm_cache": caches, "prefix_len": len(tokens) - len(rest), "extra_hash": extra_hash}
        return found if len(rest) < len(tokens) and suffix_is_text_only(found["prefix_len"]) else None

    def checkpoint_lengths(self, tokens: list[int], _: Any) -> list[int]:
        least = apc.media_safe_prefix_min(tokens, self.image_ids)
        return [at for at in self.stops.pop(tuple(tokens), ()) if at >= least]

    def store_checkpoint(self, tokens: Any, caches: Any, extra_hash: int = 0, batch_idx: Any = 0, **_: Any) -> bool:
        try:
            return self.manager.radix.insert(tokens, caches, row=batch_idx or 0, **self.named(tokens, extra_hash)) > 0
        except RadixCacheError:
            return False

    def commit(self, caches: Any, tokens: list[int], **more: Any) -> bool:
        return self.store_checkpoint(tokens, caches, **more)


if __name__ == "__main__":
    apc.APCCoordinator, server.ResponseGenerator._gpu_embed = Coordinator, embed
    apc.semantic_extra_hash = lambda image_hash=0, **other: semantic_hash(**other) * HASHES + image_hash % HASHES
    server.main()
