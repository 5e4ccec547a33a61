"""Clients of a server that leave early, and the memory of this process."""

import asyncio
from pathlib import Path

from support.bad_requests import BAD

SMALL = [bad for bad in BAD if len(bad.content) < 20_000]


async def leaving(client, number):
    body = {"prompt": f"leave {number}", "max_tokens": 100, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return


async def unfinished(client, number):
    """Send a body that never ends, then disconnect."""
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()


def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0
