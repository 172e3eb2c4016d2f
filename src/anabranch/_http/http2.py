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

_CLIENT = config.H2Configuration(client_side=True, header_encoding=None)
_SERVER = config.H2Configuration(client_side=False, header_encoding=None)


def client_session(*, window_bytes: int, frame_bytes_max: int, head_bytes_max: int) -> Http2Session:
    """`window_bytes` is the receive window of each stream."""
    session = Http2Session(_CLIENT)
    session.max_inbound_frame_size = frame_bytes_max
    session.local_settings = settings.Settings(
        client=True,
        initial_values={
            settings.SettingCodes.ENABLE_PUSH: 0,
            settings.SettingCodes.INITIAL_WINDOW_SIZE: window_bytes,
            settings.SettingCodes.MAX_FRAME_SIZE: frame_bytes_max,
            settings.SettingCodes.MAX_HEADER_LIST_SIZE: head_bytes_max,
        },
    )
    return session


def server_session(*, streams_max: int, window_bytes: int, head_bytes_max: int) -> Http2Session:
    session = Http2Session(_SERVER)
    session.local_settings = settings.Settings(
        client=False,
        initial_values={
            settings.SettingCodes.MAX_CONCURRENT_STREAMS: streams_max,
            settings.SettingCodes.INITIAL_WINDOW_SIZE: window_bytes,
            settings.SettingCodes.MAX_HEADER_LIST_SIZE: head_bytes_max,
        },
    )
    return session
