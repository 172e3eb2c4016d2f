#!/bin/sh
# Sets the desired count of an ECS service to what `anabranch apps scale` advises.
# Run it every minute: as a scheduled task of EventBridge Scheduler, in the image of the workers with the AWS CLI added.
# The task role needs a worker's permissions on the lease table, ecs:DescribeServices and ecs:UpdateService.
set -eu
app=${1:?application} cluster=${2:?cluster} service=${3:?service}

workers=$(anabranch apps scale "$app" --leases dynamodb:// --worker-rate 500 --min 1 --max 8 --json |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["workers"])')
now=$(aws ecs describe-services --cluster "$cluster" --services "$service" \
  --query 'services[0].desiredCount' --output text)
if [ "$workers" != "$now" ]; then
  aws ecs update-service --cluster "$cluster" --service "$service" --desired-count "$workers" >/dev/null
  echo "$service: $now -> $workers workers"
fi
