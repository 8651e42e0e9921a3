"""The services' default addresses. Imports nothing, so that flags can name them at no cost."""

CACHE = "127.0.0.1:7410"
ENGINE = "127.0.0.1:7411"
