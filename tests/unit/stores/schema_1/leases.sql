BEGIN TRANSACTION;
CREATE TABLE anabranch_applications (
        application TEXT PRIMARY KEY,
        app_id TEXT NOT NULL,
        created_wall_ms INTEGER NOT NULL,
        incarnation TEXT NOT NULL
    ) WITHOUT ROWID
    ;
INSERT INTO "anabranch_applications" VALUES('audit','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',1700000000000,'139fc1037ad340b2a6af195439a1b5d6:65024:2146932/427541d15f484acbba585a5b01c3ffea:65024:2146931');
INSERT INTO "anabranch_applications" VALUES('billing','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',1700000000000,'139fc1037ad340b2a6af195439a1b5d6:65024:2146932/427541d15f484acbba585a5b01c3ffea:65024:2146931');
CREATE TABLE anabranch_commands (
        application TEXT NOT NULL,
        command TEXT NOT NULL,
        action TEXT NOT NULL,
        stream TEXT,
        generation INTEGER,
        shard TEXT,
        arguments TEXT NOT NULL,
        requested_by TEXT NOT NULL,
        requested_wall_ms INTEGER NOT NULL,
        state TEXT NOT NULL,
        result TEXT NOT NULL,
        PRIMARY KEY (application, command)
    ) WITHOUT ROWID
    ;
INSERT INTO "anabranch_commands" VALUES('audit','c1','pause','123456789012:orders:1700000000',0,'shardId-000000000001','{}','me',3,'pending','');
INSERT INTO "anabranch_commands" VALUES('billing','c1','pause','123456789012:orders:1700000000',0,'shardId-000000000001','{}','me',3,'pending','');
CREATE TABLE anabranch_leases (
        application TEXT NOT NULL,
        stream TEXT NOT NULL,
        generation INTEGER NOT NULL,
        shard TEXT NOT NULL,
        owner TEXT,
        count INTEGER NOT NULL,
        checkpoint TEXT,
        completed INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        starts_at TEXT NOT NULL,
        waits_for TEXT NOT NULL,
        hash_key_range TEXT,
        frontier TEXT,
        open_keys TEXT NOT NULL,
        seek_epoch INTEGER NOT NULL,
        order_mode TEXT NOT NULL,
        seen_through_seconds REAL,
        finish_reason TEXT,
        children TEXT NOT NULL,
        stopped_reason TEXT,
        stopped_position TEXT,
        stopped_partition_key TEXT,
        stopped_member TEXT,
        stopped_wall_ms INTEGER,
        paused INTEGER NOT NULL,
        takes_without_progress INTEGER NOT NULL,
        records_handled INTEGER NOT NULL,
        checkpointed_wall_ms INTEGER,
        PRIMARY KEY (application, stream, generation, shard)
    ) WITHOUT ROWID
    ;
INSERT INTO "anabranch_leases" VALUES('audit','123456789012:orders:1700000000',0,'shardId-000000000000','w1#00000000000000000000000000000000',9,NULL,1,3,'AT_TIMESTAMP 1700000000.5','[]',NULL,NULL,'[]',0,'shard',NULL,'end','["shardId-000000000001"]',NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
INSERT INTO "anabranch_leases" VALUES('audit','123456789012:orders:1700000000',0,'shardId-000000000001','w1#00000000000000000000000000000000',4,'100000000000000000000000000000000000000000000000000000007:3',0,4,'TRIM_HORIZON','["shardId-000000000000"]','0-340282366920938463463374607431768211455','100000000000000000000000000000000000000000000000000000009','[["00ff333435363738","100000000000000000000000000000000000000000000000000000008",2,"open"]]',1,'key',1700000001.5,NULL,'[]','the handler failed','100000000000000000000000000000000000000000000000000000008','user-1','w1#00000000000000000000000000000000',7,0,1,9,10);
INSERT INTO "anabranch_leases" VALUES('billing','123456789012:orders:1700000000',0,'shardId-000000000000','w1#00000000000000000000000000000000',9,NULL,1,3,'AT_TIMESTAMP 1700000000.5','[]',NULL,NULL,'[]',0,'shard',NULL,'end','["shardId-000000000001"]',NULL,NULL,NULL,NULL,NULL,0,0,0,NULL);
INSERT INTO "anabranch_leases" VALUES('billing','123456789012:orders:1700000000',0,'shardId-000000000001','w1#00000000000000000000000000000000',4,'100000000000000000000000000000000000000000000000000000007:3',0,4,'TRIM_HORIZON','["shardId-000000000000"]','0-340282366920938463463374607431768211455','100000000000000000000000000000000000000000000000000000009','[["00ff333435363738","100000000000000000000000000000000000000000000000000000008",2,"open"]]',1,'key',1700000001.5,NULL,'[]','the handler failed','100000000000000000000000000000000000000000000000000000008','user-1','w1#00000000000000000000000000000000',7,0,1,9,10);
CREATE TABLE anabranch_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "anabranch_meta" VALUES('schema_version','1');
INSERT INTO "anabranch_meta" VALUES('uuid','139fc1037ad340b2a6af195439a1b5d6');
CREATE TABLE anabranch_streams (
        application TEXT NOT NULL,
        stream TEXT NOT NULL,
        name TEXT NOT NULL,
        arn TEXT NOT NULL,
        created_seconds REAL NOT NULL,
        origin TEXT NOT NULL,
        generation INTEGER NOT NULL,
        bootstrapped INTEGER NOT NULL,
        count INTEGER NOT NULL,
        PRIMARY KEY (application, stream)
    ) WITHOUT ROWID
    ;
INSERT INTO "anabranch_streams" VALUES('audit','123456789012:orders:1700000000','orders','arn:aws:kinesis:eu-west-1:123456789012:stream/orders',1700000000.0,'AT_TIMESTAMP 1700000000.5',0,1,1);
INSERT INTO "anabranch_streams" VALUES('billing','123456789012:orders:1700000000','orders','arn:aws:kinesis:eu-west-1:123456789012:stream/orders',1700000000.0,'AT_TIMESTAMP 1700000000.5',0,1,1);
CREATE INDEX anabranch_leases_unfinished
    ON anabranch_leases (application, stream, generation, shard) WHERE completed = 0
    ;
COMMIT;
