"""A connection whose network is cut, on one machine."""

import ctypes
import socket
import struct


def silence(connection: socket.socket) -> None:
    """Drop all that arrives at a connection, as if the network between two hosts were cut."""

    class Instruction(ctypes.Structure):
        """struct sock_filter, in linux/filter.h."""

        _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))

    drop = Instruction(0x06, 0, 0, 0)  # BPF_RET: keep no byte
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop))  # struct sock_fprog
    connection.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER, in asm-generic/socket.h
