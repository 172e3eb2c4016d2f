"""HTTP/2 in clear text, which our client never chooses by itself: the same protocol without a certificate."""

from anabranch._http.client.dialer import Dialer


class Http2Dialer(Dialer):
    async def dial(self, make_protocol, deadline):
        return await super().dial(lambda negotiated: make_protocol(negotiated or "h2"), deadline)
