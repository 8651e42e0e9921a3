"""The one asyncio loop: a step of the engine, its worker thread, open requests, and what is measured of them."""
