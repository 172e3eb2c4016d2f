"""DisableEnhancedMonitoring: turns shard-level metrics off."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_active_stream
from anabranch.local.monitoring import MONITORING_REQUEST, expand_metrics, set_metrics
from anabranch.local.state.account import Account

REQUEST = MONITORING_REQUEST


def disable_enhanced_monitoring(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_active_stream(account, request)
    wanted = set(stream.metrics) - expand_metrics(request["ShardLevelMetrics"])
    return set_metrics(account, stream, wanted, now_ms)
