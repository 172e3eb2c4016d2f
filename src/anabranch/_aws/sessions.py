"""botocore sessions: the one a user gave, or a new one by the standard chain. Blocks: it reads files."""

from typing import Any

from anabranch.config import Aws
from anabranch.errors import ConfigurationError, CredentialsError

__all__ = ["botocore_session"]


def botocore_session(aws: Aws) -> Any:
    import botocore.session  # noqa: PLC0415 -- loaded when first needed: `import anabranch` must not wait for it
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415 -- as above

    if aws.session is not None:
        # boto3's session is a wrapper; region and profile live in botocore's.
        session = getattr(aws.session, "_session", aws.session)
        if not isinstance(session, botocore.session.Session):
            raise ConfigurationError("session: a boto3.Session or botocore.session.Session is wanted")
        if not _is_blocking(session):
            raise ConfigurationError("session: aiobotocore's sessions are asynchronous; give boto3's or botocore's")
        return session
    try:
        session = botocore.session.Session(profile=aws.profile)
        session.get_scoped_config()
    except BotoCoreError as error:
        raise CredentialsError(f"the AWS profile cannot be used: {error}") from error
    return session


def _is_blocking(session: Any) -> bool:
    return not type(session).__module__.startswith("aiobotocore")
