"""Rare calls through botocore, in a thread pool of their own: control of streams here, queues, buckets and metrics
elsewhere.

botocore's own retries are switched off, so that whoever calls decides about trying again; its errors become ours.
Cancelling gives up the answer, the thread finishes its call.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from anabranch._aws.account import AwsAccount
from anabranch._aws.credentials import NO_CREDENTIALS
from anabranch._aws.errors import service_error
from anabranch._wire.bodies import AwsError
from anabranch.errors import AnabranchError, CredentialsError, InvalidRequestError, TransportError, UsageError

__all__ = ["BotocoreCalls"]

_THREADS_MAX: Final = 4


class BotocoreCalls:
    def __init__(self, account: AwsAccount, service: str, *, region: str | None = None) -> None:
        self._account = account
        self._service = service
        self._region = region
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix=f"anabranch-{service}")
        self._client: Any = None
        self._making = asyncio.Lock()

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """`operation` in AWS's words (`SplitShard`); parameters that are None are left out."""
        async with self._making:
            if self._client is None:
                self._client = await self._account.client(self._service, region=self._region)
        given = {name: value for name, value in parameters.items() if value is not None}
        try:
            pending = self._threads.submit(partial(_call, self._client, operation, given))
        except RuntimeError:
            raise UsageError("this client is closed") from None
        return await asyncio.wrap_future(pending)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()


def _call(client: Any, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """In a thread."""
    from botocore import xform_name  # noqa: PLC0415 -- botocore is loaded when first needed
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 -- as above

    try:
        answer: dict[str, Any] = getattr(client, xform_name(operation))(**parameters)
    except ClientError as error:
        raise _refusal(operation, error.response, client.meta.region_name) from error
    except (BotoCoreError, OSError) as error:
        raise _failure(operation, error) from error
    return answer


def _refusal(operation: str, answer: Any, region: str) -> AnabranchError:
    error, metadata = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    return service_error(
        operation,
        AwsError(error.get("Code"), error.get("Message") or ""),
        status=metadata.get("HTTPStatusCode", 400),
        request_id=metadata.get("RequestId"),
        region=region,
    )


def _failure(operation: str, error: Exception) -> AnabranchError:
    from botocore.exceptions import (  # noqa: PLC0415 -- botocore is loaded when first needed
        CredentialRetrievalError,
        EndpointConnectionError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
        TokenRetrievalError,
    )

    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return CredentialsError(NO_CREDENTIALS)
    if isinstance(error, CredentialRetrievalError | TokenRetrievalError):
        return CredentialsError(f"the AWS credentials could not be fetched or refreshed: {error}")
    if isinstance(error, ParamValidationError):
        return InvalidRequestError(str(error), operation=operation, code="ParamValidation")
    if isinstance(error, EndpointConnectionError):
        return TransportError(
            f"{operation}: no connection to {error.kwargs.get('endpoint_url')}: is the server running there, and are "
            "region, endpoint_url, DNS and proxy right?",
            maybe_sent=False,
        )
    return TransportError(f"{operation}: {error}")
