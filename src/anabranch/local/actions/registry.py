"""Every operation of the API but those for Channels, by name.

`REQUESTS` has the shapes of all of them. `ACTIONS` has those that are one request and one answer; PutRecords and
SubscribeToShard have values of their own and are called by name.
"""

from collections.abc import Mapping
from typing import Final

from anabranch.local.actions import (
    add_tags_to_stream,
    create_stream,
    decrease_stream_retention_period,
    delete_resource_policy,
    delete_stream,
    deregister_stream_consumer,
    describe_account_settings,
    describe_limits,
    describe_stream,
    describe_stream_consumer,
    describe_stream_summary,
    disable_enhanced_monitoring,
    enable_enhanced_monitoring,
    get_records,
    get_resource_policy,
    get_shard_iterator,
    increase_stream_retention_period,
    list_shards,
    list_stream_consumers,
    list_streams,
    list_tags_for_resource,
    list_tags_for_stream,
    merge_shards,
    put_record,
    put_records,
    put_resource_policy,
    register_stream_consumer,
    remove_tags_from_stream,
    split_shard,
    start_stream_encryption,
    stop_stream_encryption,
    subscribe_to_shard,
    tag_resource,
    untag_resource,
    update_account_settings,
    update_max_record_size,
    update_shard_count,
    update_stream_mode,
    update_stream_record_distribution_strategy,
    update_stream_warm_throughput,
)
from anabranch.local.actions.action import Action
from anabranch.local.shapes import StructureShape

__all__ = ["ACTIONS", "REQUESTS"]

ACTIONS: Final[Mapping[str, Action]] = {
    "AddTagsToStream": Action(add_tags_to_stream.REQUEST, add_tags_to_stream.add_tags_to_stream),
    "CreateStream": Action(create_stream.REQUEST, create_stream.create_stream),
    "DecreaseStreamRetentionPeriod": Action(
        decrease_stream_retention_period.REQUEST, decrease_stream_retention_period.decrease_stream_retention_period
    ),
    "DeleteResourcePolicy": Action(delete_resource_policy.REQUEST, delete_resource_policy.delete_resource_policy),
    "DeleteStream": Action(delete_stream.REQUEST, delete_stream.delete_stream),
    "DeregisterStreamConsumer": Action(
        deregister_stream_consumer.REQUEST, deregister_stream_consumer.deregister_stream_consumer
    ),
    "DescribeAccountSettings": Action(
        describe_account_settings.REQUEST, describe_account_settings.describe_account_settings
    ),
    "DescribeLimits": Action(describe_limits.REQUEST, describe_limits.describe_limits),
    "DescribeStream": Action(describe_stream.REQUEST, describe_stream.describe_stream),
    "DescribeStreamConsumer": Action(
        describe_stream_consumer.REQUEST, describe_stream_consumer.describe_stream_consumer
    ),
    "DescribeStreamSummary": Action(describe_stream_summary.REQUEST, describe_stream_summary.describe_stream_summary),
    "DisableEnhancedMonitoring": Action(
        disable_enhanced_monitoring.REQUEST, disable_enhanced_monitoring.disable_enhanced_monitoring
    ),
    "EnableEnhancedMonitoring": Action(
        enable_enhanced_monitoring.REQUEST, enable_enhanced_monitoring.enable_enhanced_monitoring
    ),
    "GetRecords": Action(get_records.REQUEST, get_records.get_records),
    "GetResourcePolicy": Action(get_resource_policy.REQUEST, get_resource_policy.get_resource_policy),
    "GetShardIterator": Action(get_shard_iterator.REQUEST, get_shard_iterator.get_shard_iterator),
    "IncreaseStreamRetentionPeriod": Action(
        increase_stream_retention_period.REQUEST, increase_stream_retention_period.increase_stream_retention_period
    ),
    "ListShards": Action(list_shards.REQUEST, list_shards.list_shards),
    "ListStreamConsumers": Action(list_stream_consumers.REQUEST, list_stream_consumers.list_stream_consumers),
    "ListStreams": Action(list_streams.REQUEST, list_streams.list_streams),
    "ListTagsForResource": Action(list_tags_for_resource.REQUEST, list_tags_for_resource.list_tags_for_resource),
    "ListTagsForStream": Action(list_tags_for_stream.REQUEST, list_tags_for_stream.list_tags_for_stream),
    "MergeShards": Action(merge_shards.REQUEST, merge_shards.merge_shards),
    "PutRecord": Action(put_record.REQUEST, put_record.put_record),
    "PutResourcePolicy": Action(put_resource_policy.REQUEST, put_resource_policy.put_resource_policy),
    "RegisterStreamConsumer": Action(
        register_stream_consumer.REQUEST, register_stream_consumer.register_stream_consumer
    ),
    "RemoveTagsFromStream": Action(remove_tags_from_stream.REQUEST, remove_tags_from_stream.remove_tags_from_stream),
    "SplitShard": Action(split_shard.REQUEST, split_shard.split_shard),
    "StartStreamEncryption": Action(start_stream_encryption.REQUEST, start_stream_encryption.start_stream_encryption),
    "StopStreamEncryption": Action(stop_stream_encryption.REQUEST, stop_stream_encryption.stop_stream_encryption),
    "TagResource": Action(tag_resource.REQUEST, tag_resource.tag_resource),
    "UntagResource": Action(untag_resource.REQUEST, untag_resource.untag_resource),
    "UpdateAccountSettings": Action(update_account_settings.REQUEST, update_account_settings.update_account_settings),
    "UpdateMaxRecordSize": Action(update_max_record_size.REQUEST, update_max_record_size.update_max_record_size),
    "UpdateShardCount": Action(update_shard_count.REQUEST, update_shard_count.update_shard_count),
    "UpdateStreamMode": Action(update_stream_mode.REQUEST, update_stream_mode.update_stream_mode),
    "UpdateStreamRecordDistributionStrategy": Action(
        update_stream_record_distribution_strategy.REQUEST,
        update_stream_record_distribution_strategy.update_stream_record_distribution_strategy,
    ),
    "UpdateStreamWarmThroughput": Action(
        update_stream_warm_throughput.REQUEST, update_stream_warm_throughput.update_stream_warm_throughput
    ),
}

REQUESTS: Final[Mapping[str, StructureShape]] = {
    **{operation: action.request for operation, action in ACTIONS.items()},
    "PutRecords": put_records.REQUEST,
    "SubscribeToShard": subscribe_to_shard.REQUEST,
}
