"""Plain TCP between raysgd's own processes, for what is too frequent for Ray (doc/design/0008 has the figures).

It carries copies of what Ray could carry as well: where a connection cannot be made or breaks, both ends go on through
Ray's streams with the same sequence numbers, so nothing is lost and nothing comes twice. Whoever connects must show a
random token, which only Ray has handed out, before anything is read from it. Knows neither Ray nor what is sent.
"""

from raysgd.transport.endpoint import Endpoint, connect
from raysgd.transport.listener import Handler, Listener
from raysgd.transport.messages import read_message, receive_message, write_message

__all__ = ["Endpoint", "Handler", "Listener", "connect", "read_message", "receive_message", "write_message"]
