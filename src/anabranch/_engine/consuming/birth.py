"""The application's row in the lease store, its birth certificate: found, or made where that is allowed (rule L14).

Only a start does this. A running worker that finds the row gone, or another in its place, stops instead.
"""

from msgspec.structs import replace

from anabranch._engine.consuming.worker_plan import WorkerPlan
from anabranch._engine.leases.store_calls import insist
from anabranch._engine.outside import Outside
from anabranch._model.leases import AppRow
from anabranch.errors import LeaseStoreInvalidError

__all__ = ["open_application"]

OPENING_DEADLINE_MS = 30_000
"""Of one try: making tables takes longer than any call later on."""


async def open_application(outside: Outside, plan: WorkerPlan) -> AppRow:
    async def open_once() -> AppRow:
        """Each try proposes another identity: one proposed before may have been reset since."""
        if plan.settings.leases.create == "never" and await outside.store.read_app() is None:
            raise LeaseStoreInvalidError(
                f"there is no application {plan.app.app!r} in {plan.store_name}, and LeaseSettings(create='never') "
                "makes none: check app= and leases=; if the store was emptied, restore it; to begin anew, start one "
                "worker with create='if_missing'"
            )
        app_id = f"{outside.entropy.getrandbits(128):032x}"
        return await outside.store.open(replace(plan.app, app_id=app_id))

    return await insist(outside, open_once, deadline_ms=OPENING_DEADLINE_MS)
