"""A backend with C code for one op. Ingot reads `BACKEND` when it compiles and when it serves."""

from ingot.backends.outside import PackageBackend

BACKEND = PackageBackend(
    emit={"cpu": "my_backend.emit:CGates"},
    executable="my_backend.load:load",
)
