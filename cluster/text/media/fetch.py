"""ImageFetcher: reads images from the hosts that an operator allows, and from no address inside the network.

A server that fetches what its users name is used to reach what they cannot reach themselves. So a host's name is
resolved once, its addresses are checked, and the connection goes to the address that was checked; a redirect passes
the same checks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import SplitResult, urljoin, urlsplit

import httpx

from ....proto.errors import InvalidRequest, Overloaded
from .image_source import ImageError, ImageSource

MAX_FILE_BYTES = 32 << 20
# From the resolution of the name to the last byte, over all redirects.
FETCH_TIMEOUT_S = 15.0
MAX_REDIRECTS = 3
# Of one request, and of the process.
MAX_CONCURRENT_OF_REQUEST, MAX_CONCURRENT = 4, 32
# Until another fetch of the process has ended.
QUEUE_TIMEOUT_S = 30.0

_ENTRY = re.compile(r"(?:(https?)://)?([^:]+)(?::(\d+))?")
_PORTS = {"https": 443, "http": 80}
# Ranges whose addresses stand for an IPv4 address: NAT64.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class _AllowedHost:
    """An entry of --allowed-media-domains.

    Attributes:
        port: None for the scheme's own; a port that is named allows addresses that are not public, too.
    """

    scheme: str
    name: str
    port: int | None

    @staticmethod
    def of(entry: str) -> _AllowedHost:
        found = _ENTRY.fullmatch(entry)
        assert found is not None, "the option was checked"
        scheme, name, port = found.groups()
        return _AllowedHost(scheme or "https", name.lower(), int(port) if port else None)

    def allows(self, url: SplitResult, port: int) -> bool:
        has_port = port == (self.port or _PORTS[url.scheme])
        return has_port and (url.scheme == self.scheme or url.scheme == "https") and url.hostname == self.name


class ImageFetcher:
    """Reads images of URLs. For one event loop.

    Args:
        domains: entries of --allowed-media-domains.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        self._allowed = tuple(map(_AllowedHost.of, domains))
        self._limit = asyncio.Semaphore(MAX_CONCURRENT)

    async def fetch_all(self, images: Sequence[tuple[str, ImageSource]]) -> Mapping[str, ImageSource]:
        """Return place |-> the image with the content of its file.

        Raises:
            InvalidRequest: a URL is not allowed, or its file cannot be read.
            Overloaded: too many images are being fetched.
        """
        for place, image in images:  # before anything is fetched
            try:
                self._find(image.url)
            except ImageError as error:
                raise InvalidRequest(place, str(error)) from error
        limit = asyncio.Semaphore(MAX_CONCURRENT_OF_REQUEST)

        async def fetch(place: str, image: ImageSource) -> tuple[str, ImageSource]:
            async with limit:
                try:
                    data = await self._fetch_in_turn(image.url)
                except ImageError as error:
                    raise InvalidRequest(place, str(error)) from error
            return place, ImageSource(data=data, detail=image.detail)

        tasks = [asyncio.ensure_future(fetch(place, image)) for place, image in images]
        try:
            return dict(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch_in_turn(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                await self._limit.acquire()
        except TimeoutError:
            raise Overloaded(
                f"{MAX_CONCURRENT} images are being fetched, for {QUEUE_TIMEOUT_S:g} s"
            ) from None
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                return await self._fetch(url)
        except TimeoutError:
            raise ImageError(f"was not sent by its host within {FETCH_TIMEOUT_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ImageError(f"cannot be fetched: {str(error)[:200] or type(error).__name__}") from error
        finally:
            self._limit.release()

    async def _fetch(self, url: str) -> bytes:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            verify=self._tls, trust_env=False, timeout=FETCH_TIMEOUT_S, limits=limits
        ) as client:
            for _ in range(1 + MAX_REDIRECTS):
                found = await self._request(client, url)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        raise ImageError(f"is redirected more than {MAX_REDIRECTS} times")

    async def _request(self, client: httpx.AsyncClient, url: str) -> bytes | str:
        """Return the file, or the URL of a redirect."""
        allowed, parts, port = self._find(url)
        address = await _address_of(parts.hostname or "", port, may_be_private=allowed.port is not None)
        host = f"[{address}]" if ":" in address else address
        target = parts._replace(netloc=f"{host}:{port}", fragment="").geturl()
        headers = {"Host": parts.netloc, "Accept": "image/*", "Accept-Encoding": "identity"}
        request = client.build_request(
            "GET", target, headers=headers, extensions={"sni_hostname": parts.hostname or ""}
        )
        response = await client.send(request, stream=True)
        try:
            if response.has_redirect_location:
                return str(response.headers["location"])
            if response.status_code != httpx.codes.OK:
                raise ImageError(f"cannot be fetched: its host answers with status {response.status_code}")
            return await _body(response)
        finally:
            await response.aclose()

    def _find(self, url: str) -> tuple[_AllowedHost, SplitResult, int]:
        """Return the entry that allows a URL, with its parts and its port. Raises ImageError."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError as error:
            raise ImageError(f"has a URL that cannot be read: {error}") from error
        if not parts.hostname or parts.scheme not in _PORTS or "@" in parts.netloc:
            raise ImageError("has a URL of another form, must be https://HOST/PATH")
        if not self._allowed:
            raise ImageError("is a URL, which the server does not fetch; send the image as a data: URL")
        entry = next((each for each in self._allowed if each.allows(parts, port)), None)
        if entry is None:
            raise ImageError(
                f"has the URL of a host that is not allowed, {parts.scheme}://{parts.hostname[:100]}:{port}; the "
                "server fetches from its --allowed-media-domains only"
            )
        return entry, parts, port

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()


async def _address_of(host: str, port: int, *, may_be_private: bool) -> str:
    """Return an address of a host, all of whose addresses are allowed. Raises ImageError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ImageError(f"has the URL of a host that cannot be found, {host[:100]}") from error
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not may_be_private and not is_public(address):
            raise ImageError(f"has the URL of a host with an address that is not public, {host[:100]}")
    return addresses[0]


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet: not private, link-local, loopback or reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner and not is_public(str(inner)):
            return False
        if ip.ipv4_mapped or ip in _NAT64:
            return True
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


async def _body(response: httpx.Response) -> bytes:
    """Return the bytes of a response as they come. Raises ImageError if they are too many."""
    pieces, num_bytes = [], 0
    async for piece in response.aiter_raw():
        num_bytes += len(piece)
        if num_bytes > MAX_FILE_BYTES:
            raise ImageError(f"has more than {MAX_FILE_BYTES:,} bytes")
        pieces.append(piece)
    return b"".join(pieces)
