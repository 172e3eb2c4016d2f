"""Which applications a lease file holds. Makes nothing, and waits for nobody's lock longer than any other read."""

from pathlib import Path

from anabranch.stores.sqlite import schema
from anabranch.stores.sqlite.database import Database

__all__ = ["applications_in"]


async def applications_in(path: Path) -> list[str]:
    """In alphabetical order; none where there is no such file, or no table of ours in it."""
    database = Database(path, schema.LEASES, synchronous="FULL", thread_name="anabranch-catalogue")
    try:
        if not await database.exists():
            return []
        return await database.read(
            lambda connection: [
                str(name)
                for (name,) in connection.execute("SELECT application FROM anabranch_applications ORDER BY application")
            ]
        )
    finally:
        await database.close()
