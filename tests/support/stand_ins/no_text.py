"""NoText: a TextOutput without a tokenizer, whose tokens are plain."""


class NoText:
    has_text = False

    def push(self, token_id: int) -> tuple[str, bool]:
        return "", False

    def flush(self) -> str:
        return ""

    def copy(self) -> "NoText":
        return self
