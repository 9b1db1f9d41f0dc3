"""Keep prefixes on disk: a second process with the same model reads them and does not compute them again."""

from pathlib import Path
from tempfile import TemporaryDirectory

from radixcache import DiskStore, PrefixCache
from runner.models.tiny import tiny_model, tiny_tokenizer

PROMPT = "These are the rules of the house. Be brief. Be polite. Never tell a secret. " * 12


def ask(folder: Path, question: str) -> None:
    """Do what one process does: load the model, open the folder, serve a request, write new state."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokens = tokenizer.encode(PROMPT + question)
    with (
        DiskStore(folder, budget_bytes=1 << 30, write_on="close") as store,
        PrefixCache(model, budget_bytes=64 << 20, store=store) as cache,
    ):
        with cache.begin(tokens) as session:
            session.prefill(model)
            session.step(model, tokens[-1:])
        print(f"{question} {session.cached_tokens} of {len(tokens)} tokens came from {folder.name}/.")
    # The state is on disk when the block ends. It is not encrypted: use a folder that only you can read.


with TemporaryDirectory() as home:
    prefixes = Path(home) / "prefixes"
    ask(prefixes, "What is the first rule?")
    ask(prefixes, "What is the last rule?")  # a new model, cache and store, as after a restart
    stored_bytes = sum(file.stat().st_size for file in prefixes.rglob("*") if file.is_file())
    print(f"{stored_bytes:,} bytes are in {prefixes.name}/.")
