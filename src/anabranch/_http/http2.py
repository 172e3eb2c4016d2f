"""The HTTP/2 library, `h2`, as our connections use it. No other module imports it, so it is easy to replace."""

from h2 import config, connection, errors, events, exceptions, settings

ConnectionTerminated = events.ConnectionTerminated
DataReceived = events.DataReceived
ErrorCodes = errors.ErrorCodes
Event = events.Event
Http2Error = exceptions.H2Error
RemoteSettingsChanged = events.RemoteSettingsChanged
RequestReceived = events.RequestReceived
ResponseReceived = events.ResponseReceived
Http2Session = connection.H2Connection
StreamEnded = events.StreamEnded
StreamReset = events.StreamReset
WindowUpdated = events.WindowUpdated
SettingCodes = settings.SettingCodes


def client_session(*, window_bytes: int, frame_bytes_max: int, head_bytes_max: int) -> Http2Session:
    """`window_bytes` is the receive window of each stream."""
    own = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.MAX_FRAME_SIZE: frame_bytes_max}
    session = _session(own, window_bytes, head_bytes_max, is_client=True)
    session.max_inbound_frame_size = frame_bytes_max
    return session


def server_session(*, streams_max: int, window_bytes: int, head_bytes_max: int) -> Http2Session:
    return _session({SettingCodes.MAX_CONCURRENT_STREAMS: streams_max}, window_bytes, head_bytes_max, is_client=False)


def _session(own: dict[SettingCodes, int], window_bytes: int, head_bytes_max: int, *, is_client: bool) -> Http2Session:
    session = Http2Session(config.H2Configuration(client_side=is_client, header_encoding=None))
    shared = {SettingCodes.INITIAL_WINDOW_SIZE: window_bytes, SettingCodes.MAX_HEADER_LIST_SIZE: head_bytes_max}
    session.local_settings = settings.Settings(client=is_client, initial_values={**own, **shared})
    return session
