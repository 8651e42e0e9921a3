"""Where the services listen unless they are told otherwise. Imports nothing, so that flags can name it at no cost."""

CACHE = "127.0.0.1:7410"
ENGINE = "127.0.0.1:7411"
