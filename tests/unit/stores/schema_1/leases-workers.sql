BEGIN TRANSACTION;
CREATE TABLE anabranch_members (
        application TEXT NOT NULL,
        member TEXT NOT NULL,
        worker TEXT NOT NULL,
        counter INTEGER NOT NULL,
        state TEXT NOT NULL,
        expiry_ms INTEGER NOT NULL,
        protocol TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        generation INTEGER NOT NULL,
        shards_max INTEGER,
        load INTEGER NOT NULL,
        lease_version INTEGER NOT NULL,
        reads_healthy INTEGER NOT NULL,
        draining INTEGER NOT NULL,
        wanted TEXT NOT NULL,
        status TEXT NOT NULL,
        joined_wall_ms INTEGER NOT NULL,
        PRIMARY KEY (application, member)
    ) WITHOUT ROWID
    ;
INSERT INTO "anabranch_members" VALUES('audit','w1#00000000000000000000000000000000','w1',7,'left',10000,'1.0','streams orders; order key',0,NULL,1,3,1,0,'[]','[]',5);
INSERT INTO "anabranch_members" VALUES('billing','w1#00000000000000000000000000000000','w1',7,'left',10000,'1.0','streams orders; order key',0,NULL,1,3,1,0,'[]','[]',5);
CREATE TABLE anabranch_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "anabranch_meta" VALUES('schema_version','1');
INSERT INTO "anabranch_meta" VALUES('uuid','427541d15f484acbba585a5b01c3ffea');
COMMIT;
